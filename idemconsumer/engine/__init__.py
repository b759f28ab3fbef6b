"""From deliveries to outcomes, in joined mode: one transaction for a group, and the exceptional paths.

Owns the transaction of every group. Uses the store, and knows nothing of lanes or brokers.
"""
