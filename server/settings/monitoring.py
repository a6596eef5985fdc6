"""What others may see of the daemon at work."""

from pydantic import BaseModel, Field


class MonitoringSettings(BaseModel):
    vllm_metric_names: bool = Field(
        True, description="Also name metrics as vLLM does, for dashboards made for it."
    )
