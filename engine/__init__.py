"""See DESIGN: the house."""
