"""verl's config keys: one table of what each is here, and the translation of verl's commands by it."""
