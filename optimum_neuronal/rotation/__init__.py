"""Rotations of the residual stream and of attention heads, learned and merged into the weights before pruning.

`parts` finds what they touch in a model, `turns` says how each weight changes, `merging` changes them, `sensitivity` and
`objective` say what a rotation is worth, `learning` finds one.
"""
