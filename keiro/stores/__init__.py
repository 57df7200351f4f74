"""Where journals live: one interface, three stores."""
