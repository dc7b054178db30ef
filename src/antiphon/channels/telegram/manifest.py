"""The manifest of the Telegram channel."""

from antiphon.channel_manifest import ChannelCapabilities, ChannelLimits, ChannelManifest

MANIFEST = ChannelManifest(
    name="telegram",
    label="Telegram",
    config_model="antiphon.channels.telegram.config:TelegramConfig",
    adapter="antiphon.channels.telegram.adapter:TelegramAdapter",
    docs_page="docs/channels/telegram.md",
    capabilities=ChannelCapabilities(
        has_groups=True, has_threads=True, has_typing=True, takes_images=True, has_webhook=True
    ),
    limits=ChannelLimits(
        text_length=4096,
        text_unit="utf-16",
        download_bytes=20 * 1024 * 1024,
        redelivery_seconds=24 * 3600,
    ),
    id_prefixes=("telegram:", "tg:"),
    thread_word="topic",
    webhook_alias="/telegram-webhook",
)
