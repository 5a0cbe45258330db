"""Gene Ontology reasoning: a protein's evidence in, one JSON object with GO terms out."""
