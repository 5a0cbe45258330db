"""The version of the training maths, readable without torch.

Raise it when a change makes the same config, tasks, prompts and seed learn something else: the
loss, the advantage, masking, task sampling, initialisation, the optimizer or its schedule; or when
the rounding of an ordinary step moves, since a resume would no longer be bit for bit the same. Leave
it alone for speed, memory, logging and layout otherwise.
"""

TRAINING_VERSION = "3"
