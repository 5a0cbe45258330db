"""The version of the training maths, readable without torch.

Raise it when a change makes the same config, tasks, prompts and seed learn something else: the
loss, the advantage, masking, task sampling, initialisation, the optimizer or its schedule. Leave
it alone for speed, memory, logging and layout, when the gradients stay the same.
"""

TRAINING_VERSION = "2"
