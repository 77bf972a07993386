"""Where workers run and how they are called, in this process or under Ray."""
