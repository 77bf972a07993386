"""Weight senders: how servers get the weights of the policy."""
