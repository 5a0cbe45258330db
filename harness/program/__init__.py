"""A research program on disk: GOAL, CONTEXT, PLAN and THREAD."""
