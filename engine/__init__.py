"""The engine: everything Vitrine computes, with torch alone. Packages are methods, modules are shared."""
