"""What the views write."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):  # type: ignore[misc]
    name = models.TextField(primary_key=True)  # there may be more than one of a name: nothing here looks for one

    class Meta:
        managed = False
        db_table = "effect"
