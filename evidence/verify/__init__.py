"""The papers' own claims on a published checkpoint that the user has: ``vitrine verify``. Nothing is downloaded."""
