"""Published methods that are not on the frontier: they use the core's contracts, and the core never imports them.

A method lies here when our measurements have another one ahead of it at the same bytes. Its file has that figure.
Recipes name it like any other. Its kernels, if any, lie in `kernels`; its memory may be a bound instead of a formula.
"""
