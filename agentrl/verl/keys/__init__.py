"""verl's config keys: one table with the meaning of each here, and the translation of verl's commands by it."""
