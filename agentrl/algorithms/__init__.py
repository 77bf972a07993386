"""Advantages, policy losses and KL on ragged tensors: pure functions that import nothing else of agentrl but errors.

Legend: T tokens of N sequences in a row, `offsets` [N + 1] says where each begins
(`agentrl.trajectory.batch.RaggedBatch`); `mask` [T] bool is True where the policy
sampled the token, and rewards are on such tokens only. Nothing is padded; the log-probs, values and losses of the other
tokens, even NaN, change no result and no gradient.
"""
