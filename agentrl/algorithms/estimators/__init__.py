"""The built-in advantage estimators, one a file.

All give a trajectory one total reward, the sum of the token rewards of all its sequences, and take its sequences in the
order of the batch. Estimators that compare the trajectories of a prompt give a group of one advantage 0 where more were
asked for (n > 1). Such a group has nothing to compare with, and its raw reward is no advantage. With n = 1 they take
the reward itself.
"""
