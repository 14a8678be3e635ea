"""What several tests share: small models, stand-ins for other tools, cases, measures of the sources."""
