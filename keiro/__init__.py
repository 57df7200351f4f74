"""keiro: durable workflows as event-sourced aggregates, inside your own program."""
