"""RabbitMQ, through aio-pika. The only room that imports that driver.

`session` consumes and acknowledges, `link` connects, `limits` reports what a queue's arguments would lose.
"""
