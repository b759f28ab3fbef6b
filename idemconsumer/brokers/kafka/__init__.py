"""Kafka, through aiokafka. Only this folder imports that driver.

`kafka_session` fetches and commits, `low_water` computes the offset to commit, `kafka_health` notices that the broker
is unreachable.
"""
