"""Advantages, policy losses and KL on ragged tensors: pure functions that import nothing else of agentrl.

Legend: T tokens of N sequences in a row, `offsets` [N + 1] says where each begins (`agentrl.batch.RaggedBatch`);
`mask` [T] bool is True where the policy sampled the token. Nothing is padded, and what a masked-out token holds,
even NaN, changes no result.
"""
