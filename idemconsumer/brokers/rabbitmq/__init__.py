"""RabbitMQ, through aio-pika. The only room that imports that driver.

`session` consumes and acknowledges, `tap` reads its deliveries from the bytes, `link` connects, `limits` reports what a
queue's arguments would lose.
"""
