"""The annex for live clients: sessions that nobody at the trainer began, their store, and their feedback."""
