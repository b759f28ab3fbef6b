"""From deliveries to outcomes, in joined mode: one transaction for a group, and every detour around it.

Owns the transaction of every group. Knows the store, and nothing of lanes or brokers.
"""
