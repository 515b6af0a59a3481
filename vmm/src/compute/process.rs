//! The process of a VM on a node that is not its primary.

use std::io::{self, BufReader, Read as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use memory_fabric::compute::{
    COMPUTE_REASON_BYTES_MAX, ComputeEnd, ComputeRequest, Listeners, Membership, SharingError,
};
use memory_fabric::fabric::{Fabric, FabricEvent, FabricObserver, LeasingNode};
use memory_fabric::guest_memory::GuestMemory;
use memory_fabric::link::LinkEvent;
use memory_fabric::rdma::Settings;
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit,
};
use signal_hook::consts::{SIGHUP, SIGUSR1};
use signal_hook::flag;
use ssi_hv_sandbox::{Sandbox, be_alone};

use super::join::{Joined, Shared, byte_ranges, layout};
use super::observed::SharingReporter;
use super::protocol::{Connect, ProcessMessage, RdmaOfNode, Setup, receive_line, send_line};
use crate::exit::ExitCode;
use crate::instance::{guest_memory, lost_memory};
use crate::machine::{
    HostCounter, MachineError, Outcome, Secondary, SecondaryConfig, SecondaryHandle,
    all_memory_ranges,
};
use crate::stderr;

/// Open files that the process may have: those of its connections, vCPUs and standard streams are far
/// fewer.
const OPEN_FILES_MAX: u64 = 1024;
/// Address space beside the two views of the guest's memory: the program, its tables and threads.
const ADDRESS_SPACE_MORE: u64 = 4 << 30;
/// How likely the kernel ends this process when memory runs out (proc_pid_oom_score_adj(5)): before
/// the node, whose end would end all its VMs.
const OOM_SCORE_ADJ: &str = "500";
/// How long the process may take to end after its node.
const END_TIME_MAX: Duration = Duration::from_secs(5);

/// Serves the node that started this process, over its standard input and output, and never returns
/// while a thread may wait for a page.
pub fn serve() -> ExitCode {
    let ended = run();
    let (reason, code) = match ended {
        Ok(()) => (String::new(), ExitCode::Success),
        Err(error) => (format!("{error:#}"), ExitCode::HostError),
    };
    let reason = shortened(reason);
    // The node reads it while it lives.
    let _ = send_line(
        &mut io::stdout(),
        &ProcessMessage::Ended(ComputeEnd { reason }),
    );
    stderr::flush();
    // A vCPU that waits for a page of another node is left behind, and ends with the process.
    std::process::exit(code.code().into())
}

fn shortened(mut reason: String) -> String {
    let mut end = COMPUTE_REASON_BYTES_MAX.min(reason.len());
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason.truncate(end);
    reason
}

fn run() -> Result<()> {
    let delayed = stderr::Delayed::begin();
    // What a service manager sends to all processes of the node.
    for signal in [SIGHUP, SIGUSR1] {
        flag::register(signal, Arc::default()).context("cannot ignore signals for the node")?;
    }
    // Whatever state this process is in, it ends with its node.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot end with the node")?;
    let mut input = BufReader::new(io::stdin());
    let setup: Setup = receive_line(&mut input).context("the node sent no request")?;
    let Setup {
        request,
        address,
        secured,
        rdma,
    } = setup;
    request.check()?;
    let rdma = rdma_of(&request, &rdma, secured)?;
    let ranges = all_memory_ranges(request.memory_bytes, request.hotplug_bytes);
    let span = ranges.last().map_or(0, |(start, bytes)| start.0 + bytes);
    limit(span).context("cannot limit this process")?;
    // It needs no file of its own.
    let _restricted = be_alone()
        .and_then(|()| Sandbox::default().enter())
        .context("cannot restrict this process")?;
    drop(delayed);
    let listeners = match secured {
        true => Listeners::secured(address, request.vm, request.me),
        false => Listeners::bind(address),
    };
    let listeners = listeners.context("cannot listen for other nodes")?;
    let ports = listeners.ports().context("cannot listen for other nodes")?;
    send_line(&mut io::stdout(), &ProcessMessage::Listening(ports))?;
    let Connect {
        table,
        leases,
        authorities,
    } = receive_line(&mut input).context("the node sent no addresses of the nodes")?;
    let ends = Arc::new(Ends::default());
    watch(input, Arc::clone(&ends))?;

    let ComputeRequest {
        name,
        me,
        vm,
        secret,
        cpus,
        merge_tables,
        in_order,
        ..
    } = request;
    let membership = Membership {
        me,
        vm,
        secret,
        table,
        ranges: byte_ranges(&ranges),
        merge_tables,
        layout: layout(in_order),
        rdma,
    };
    let credentials = listeners.delegate(authorities);
    let credentials = credentials.context("this node cannot know the donors of the VM")?;
    // Dropped after the memory, whose pages are at its donors.
    let donors = match leases.is_empty() {
        true => None,
        false => {
            let node = LeasingNode {
                vm: name,
                place: me,
                ranges: byte_ranges(&ranges),
                credentials,
            };
            let joined = Fabric::join_shared(&node, &leases, &observer(&ends));
            Some(joined.context("this node has to reach the donors of the VM")?)
        }
    };
    let memory = match &donors {
        Some(fabric) => Arc::clone(fabric.memory()),
        None => {
            let span = usize::try_from(span).context("guest memory")?;
            Arc::new(GuestMemory::new(span).context("cannot create guest memory")?)
        }
    };
    let shared = Shared {
        memory: Arc::clone(&memory),
        depot: donors.as_ref().and_then(Fabric::take_depot),
    };
    let on_failure = Arc::clone(&ends);
    let failed = move |SharingError { node, reason }| {
        on_failure.end(MachineError::SharedMemory { node, reason });
    };
    let joined = Joined::connect(membership, listeners, shared, Vec::new(), failed)?;
    let clock = joined.clock.context("the primary is not among the nodes")?;
    tracing::debug!(?clock, "compared with the clock of the primary");
    let reporter = Box::new(SharingReporter {
        watched: (&joined.shared).into(),
        donors: donors.as_ref().map(|fabric| fabric.view().clone()),
    });
    let secondary = Secondary::new(SecondaryConfig {
        reporter,
        nodes: joined.nodes,
        primary: 0,
        cpus_max: cpus,
        pinning: Vec::new(),
        tsc_difference: clock.ticks,
        counter: HostCounter::default(),
    })?;
    ends.set(secondary.handle());
    let guest = guest_memory(&memory, request.memory_bytes, request.hotplug_bytes)
        .map_err(|failure| anyhow!(failure.one_line()))?;
    let outcome = secondary.run(guest);
    let stats = joined.shared.stats();
    let (faults, pages) = (stats.faults.get(), stats.from_member.get());
    let (tables, changes) = (stats.merged_tables.get(), stats.table_changes.get());
    tracing::debug!(faults, pages, tables, changes, "memory shared");
    // Others have what they need of it, or are lost. Threads may wait for it for ever.
    std::mem::forget(joined.shared);
    // Its leases end; a page that a thread waits for does not come any more.
    drop(donors);
    let outcome = outcome?;
    if let Outcome::Crash(reason) = &outcome {
        tracing::debug!(reason, "the guest crashed");
    }
    Ok(())
}

/// Ends the run when a donor of this node is lost.
fn observer(ends: &Arc<Ends>) -> FabricObserver {
    let ends = Arc::clone(ends);
    Arc::new(move |event| match event {
        FabricEvent::Link(LinkEvent::Lost { node, reason }) => {
            ends.end(MachineError::DonorLost {
                reason: lost_memory(node, &reason),
            });
        }
        FabricEvent::Link(LinkEvent::Down { node, reason }) => {
            tracing::warn!("donor {node} cannot be reached: {reason}");
        }
        FabricEvent::Link(LinkEvent::Up { node }) => tracing::warn!("donor {node} is back"),
        FabricEvent::Failed(reason) => ends.fail(reason),
        // Of replicated memory, drains and poisoned pages, which a node does not have.
        _ => {}
    })
}

/// The RDMA settings with which the memory travels, if the VM asks for RDMA.
fn rdma_of(request: &ComputeRequest, node: &RdmaOfNode, secured: bool) -> Result<Option<Settings>> {
    if !request.rdma {
        return Ok(None);
    }
    ensure!(
        !secured,
        "RDMA encrypts nothing: use --transport tcp with --credentials"
    );
    let settings = node.settings();
    let settings = settings.context("this node does without RDMA (--rdma-device none)")?;
    Ok(Some(settings))
}

/// Limits what the process can take of its host.
fn limit(span: u64) -> io::Result<()> {
    let at_most = |resource, most: u64| {
        // A limit that is lower already cannot be raised.
        let most = getrlimit(resource)
            .maximum
            .map_or(most, |now| now.min(most));
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        setrlimit(resource, limit)
    };
    at_most(Resource::Nofile, OPEN_FILES_MAX)?;
    at_most(Resource::As, 2 * span + ADDRESS_SPACE_MORE)?;
    rustix::thread::set_no_new_privs(true)?;
    // Best effort: without it, the kernel chooses by size.
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ);
    Ok(())
}

/// Ends the run from other threads, also one that has not started.
#[derive(Debug, Default)]
struct Ends(Mutex<Run>);

#[derive(Debug, Default)]
struct Run {
    handle: Option<SecondaryHandle>,
    failure: Option<MachineError>,
}

impl Ends {
    fn set(&self, handle: SecondaryHandle) {
        let mut run = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = run.failure.take() {
            handle.fail(error);
        }
        run.handle = Some(handle);
    }

    fn fail(&self, reason: String) {
        self.end(MachineError::SharedMemory { node: None, reason });
    }

    fn end(&self, error: MachineError) {
        let mut run = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &run.handle {
            Some(handle) => handle.fail(error),
            // What follows from the first one says less.
            None => drop(run.failure.get_or_insert(error)),
        }
    }
}

/// Ends this process when standard input ends: the node has ended, or wants it to.
fn watch(mut input: BufReader<io::Stdin>, ends: Arc<Ends>) -> io::Result<()> {
    let watch = move || {
        // The node sends nothing more; what it sends is dropped.
        let mut rest = [0; 64];
        while input.read(&mut rest).is_ok_and(|read| read > 0) {}
        ends.fail("the process `ssi-hv node` has ended, or ended this process".to_owned());
        let until = Instant::now() + END_TIME_MAX;
        while Instant::now() < until {
            std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
        }
        std::process::exit(ExitCode::HostError.code().into());
    };
    let thread = std::thread::Builder::new().name("node".into());
    thread.spawn(watch).map(|_| ())
}
