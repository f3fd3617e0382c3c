"""Two-stage Delta tables, the writer's side: units and their chain."""
