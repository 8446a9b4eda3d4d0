"""Pictures of measurements. Reads tables, never imports torch."""
