"""Kafka, through aiokafka. The only room that imports that driver.

`session` fetches and commits, `low_water` says up to where, `health` notices that the broker has gone.
"""
