"""Every config key, its type, its default and what it does, by section. Importable without torch."""
