"""Models, chat rendering and the generation engine."""
