"""Drug-protein relations as a 13-way multiple choice."""
