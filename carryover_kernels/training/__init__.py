"""Training of drafters: corpus, target responses, parallel draft-verify-draft, losses, the embedded models."""
