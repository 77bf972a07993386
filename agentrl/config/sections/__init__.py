"""Config keys by section: type, default, rules, description. Importable without torch."""
