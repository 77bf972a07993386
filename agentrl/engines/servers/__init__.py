"""Rollout engines over HTTP servers: what does not depend on which server software runs."""
