"""Places where workers run, in this process or under Ray, and calls to them."""
