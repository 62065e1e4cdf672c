"""How a network runs: device and precision, compiled modules, processes, progress, memory budgets."""
