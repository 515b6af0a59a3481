//! `ssi-hv hotplug`.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use ssi_hv::control_socket::changes::Seen;
use ssi_hv::control_socket::client::{ask, call};
use ssi_hv::control_socket::protocol::{HotplugBody, HotplugTarget};
use ssi_hv::control_socket::route::Method;
use ssi_hv::exit::ExitCode;
use ssi_hv::progress::Progress;
use ssi_hv::size::ByteSize;

use super::control::{of_vm, vm_entry};
use super::status::running;
use super::{Failure, print};
use crate::cli::control::HotplugConfig;

const PATH: &str = "/v1/hotplug";

/// Unit of the progress bar.
const MIB_SHIFT: u32 = 20;

/// Changes the memory of a guest, or shows it.
pub fn hotplug(config: &HotplugConfig) -> Result<ExitCode, Failure> {
    let running = running()?;
    let (entry, who) = vm_entry(&running, &config.vm)?;
    let mut body: HotplugBody = match config.memory {
        Some(memory) => {
            let target = HotplugTarget {
                requested_bytes: memory.bytes(),
                donor: config.donor.as_ref().map(ToString::to_string),
            };
            of_vm(&who, call(&entry.path, Method::Put, PATH, Some(&target)))?
        }
        None => of_vm(&who, ask(&entry.path, PATH))?,
    };
    let wanted = config.memory.map_or(body.requested_bytes, ByteSize::bytes);
    let wait = Duration::from_secs(config.wait.into());
    let deadline = Instant::now() + wait;
    let (from, mut progress) = (body.plugged_bytes, None);
    while wait > Duration::ZERO && !is_done(&body, wanted) {
        if let (None, Some(error)) = (&body.joining, &body.error) {
            return Err(anyhow!("{who}: {error}").into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(anyhow!(
                "{who} has {} of the {} plugged after {} s; its kernel needs the driver virtio_mem, \
                 and gives back only what it can move",
                size(body.plugged_bytes),
                size(wanted),
                wait.as_secs()
            )
            .into());
        }
        let progress = progress.get_or_insert_with(|| Plugging::begin(from, wanted));
        // The answer arrives after a change, or after the longest wait of a request.
        let seen = Seen {
            changes: body.changes,
            wait: left,
        };
        body = of_vm(&who, ask(&entry.path, &format!("{PATH}?{seen}")))?;
        progress.reach(&body);
    }
    drop(progress);
    print(&format!("{who}: {}\n", said(&body)))?;
    Ok(ExitCode::Success)
}

/// Progress bar of memory that is plugged or unplugged.
struct Plugging {
    progress: Progress,
    /// Memory that was plugged at the start.
    from: u64,
}

impl Plugging {
    fn begin(from: u64, wanted: u64) -> Self {
        let what = if wanted < from {
            "unplugging"
        } else {
            "plugging"
        };
        let steps = wanted.abs_diff(from) >> MIB_SHIFT;
        let progress = Progress::begin(what, steps, "MiB");
        Self { progress, from }
    }

    fn reach(&self, body: &HotplugBody) {
        let done = body.plugged_bytes.abs_diff(self.from) >> MIB_SHIFT;
        self.progress.reach(done);
        match &body.joining {
            Some(who) => self.progress.say(&format!("donor {who} is joining")),
            None => self.progress.say("MiB"),
        }
    }
}

fn is_done(body: &HotplugBody, wanted: u64) -> bool {
    body.joining.is_none() && body.requested_bytes == wanted && body.plugged_bytes == wanted
}

fn said(body: &HotplugBody) -> String {
    let joining = match (&body.joining, &body.error) {
        (Some(who), _) => format!("; donor {who} is joining"),
        (None, Some(error)) => format!("; no donor has joined: {error}"),
        (None, None) => String::new(),
    };
    format!(
        "{} plugged of {} requested, {} is the limit{joining}",
        size(body.plugged_bytes),
        size(body.requested_bytes),
        size(body.max_bytes)
    )
}

fn size(bytes: u64) -> ByteSize {
    ByteSize::from_bytes(bytes)
}
