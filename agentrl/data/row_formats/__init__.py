"""Row formats: how data sets write transcripts in columns. A format is one file, a user's too."""
