"""How the toy models were made. Not in the wheel: ``python -m vitrine.evidence.recipes NAME`` runs in a checkout."""
