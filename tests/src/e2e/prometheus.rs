//! A real Prometheus on a testbed host, and the changes of metrics that it has seen.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Context;
use super::guest::SHORT;
use crate::testbed::RemoteProcess;

/// The document that lists every metric.
const METRICS: &str = include_str!("../../../docs/metrics.md");
/// Its address on host 2.
const ADDRESS: &str = "127.0.0.1:9090";
/// A program of this size takes long to start on an emulated CPU.
const START_DEADLINE: Duration = Duration::from_secs(90);

/// A running Prometheus that scrapes every second.
pub(super) struct Prometheus<'a> {
    context: &'a Context<'a>,
    _process: RemoteProcess,
}

impl<'a> Prometheus<'a> {
    /// Starts it on host 2 and waits until it answers.
    pub fn start(context: &'a Context<'a>, targets: &[&str]) -> anyhow::Result<Self> {
        ensure!(
            context.share.dir.join("prometheus").is_file(),
            "no prometheus: scripts/setup unpacks it"
        );
        let config = format!(
            "{{global: {{scrape_interval: 1s, scrape_timeout: 1s}}, \
             scrape_configs: [{{job_name: ssi-hv, static_configs: [{{targets: {targets:?}}}]}}]}}"
        );
        let script = "rm -rf /tmp/prometheus; mkdir /tmp/prometheus; cd /tmp/prometheus; \
                      printf %s \"$1\" >config.yml; exec /share/prometheus --config.file=config.yml \
                      --storage.tsdb.path=data --web.listen-address=\"$2\"";
        let host = context.testbed.host(2);
        let process = host.spawn(&["sh", "-c", script, "sh", &config, ADDRESS])?;
        process.wait_for_line("Server is ready", START_DEADLINE)?;
        Ok(Self {
            context,
            _process: process,
        })
    }

    /// Waits until a series fulfils an expression.
    pub fn wait_for(&self, expression: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + SHORT;
        while self.count(expression)? == 0 {
            ensure!(
                Instant::now() < deadline,
                "Prometheus has not seen {expression} within {} s",
                SHORT.as_secs()
            );
        }
        Ok(())
    }

    /// Returns how many series fulfil an expression.
    fn count(&self, expression: &str) -> anyhow::Result<usize> {
        let encoded = expression.bytes().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "%{byte:02x}");
            text
        });
        let url = format!("http://{ADDRESS}/api/v1/query?query={encoded}");
        let host = self.context.testbed.host(2);
        let answer = host.check(&["wget", "-q", "-O", "-", &url], SHORT)?;
        let answer: Value = serde_json::from_str(&answer)?;
        let result = answer["data"]["result"].as_array();
        let result = result.with_context(|| format!("{expression}: {answer}"))?;
        Ok(result.len())
    }

    /// Fails unless every metric whose name contains `part` had several values, and every limit
    /// among them a value other than 0; returns how many metrics there are. Those of VMs with `--node`
    /// are left out, and what only processes with a limit of locked memory have.
    pub fn saw_move(&self, part: &str) -> anyhow::Result<usize> {
        let names: Vec<&str> = METRICS
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
            .map(|(name, _)| name)
            .filter(|name| name.contains(part) && !name.starts_with("ssi_hv_compute_"))
            .filter(|name| !name.ends_with("_pinned_limit_bytes"))
            .collect();
        let mut stood = Vec::new();
        for name in &names {
            let seen = if name.ends_with("_limit") {
                self.count(&format!("max_over_time({name}[1h]) > 0"))?
            } else {
                // A histogram has no series of its own name.
                let series = match name.ends_with("_seconds") {
                    true => format!("{name}_count"),
                    false => (*name).to_owned(),
                };
                self.count(&format!(
                    "max_over_time({series}[1h]) > min_over_time({series}[1h])"
                ))?
            };
            if seen == 0 {
                stood.push(name);
            }
        }
        ensure!(
            stood.is_empty() && !names.is_empty(),
            "Prometheus saw no movement of {stood:?}"
        );
        Ok(names.len())
    }
}
