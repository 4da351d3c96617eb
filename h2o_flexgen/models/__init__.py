"""The one decoder layer and the families it can be."""
