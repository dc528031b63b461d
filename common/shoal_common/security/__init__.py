"""Who may call a service, and how connections are encrypted: tokens, certificates, secrets."""
