"""Programs as agents: how they are started, where they run, which sessions they are given, and what harnesses say."""
