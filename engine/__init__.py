"""The engine: everything Vitrine computes, with torch alone; docs/design.md describes its floors and rooms."""
