"""What uvicorn serves. Views that are no coroutine functions run in a thread of Django's."""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.http.django_shop.settings")
django = get_asgi_application()

from idemconsumer.http import IdempotencyMiddleware  # noqa: E402
from tests.http.blackbox.served.asgi import Dying  # noqa: E402
from tests.http.django_shop.urls import DOOR  # noqa: E402

application = Dying(IdempotencyMiddleware(django, DOOR))
