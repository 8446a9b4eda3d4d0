"""Where measuring meets a user's question."""
