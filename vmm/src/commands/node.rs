//! `ssi-hv node`.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use fabric_identity::Role;
use memory_fabric::compute::CpuLender;
use memory_fabric::donor::server::{Donor, DonorConfig, RdmaUse};
use memory_fabric::fabric::SPIN_DEFAULT;
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use ssi_hv::cluster::ready;
use ssi_hv::compute::CpuHost;
use ssi_hv::config::NodeSettings;
use ssi_hv::control_socket::directory::{Directory, Kind};
use ssi_hv::control_socket::route::Service;
use ssi_hv::control_socket::server::{Server, ServerError};
use ssi_hv::credentials::{self, DailyWarning};
use ssi_hv::exit::ExitCode;
use ssi_hv::membership::record::register;
use ssi_hv::node::{METRICS, NodeState, ROUTES, counters, reload};
use ssi_hv::progress::Followed;
use ssi_hv::report::ReportFile;
use ssi_hv::size::ByteSize;
use ssi_hv::{forced_end, host, lifeline, metrics};

use super::{Failure, print};

/// Unit of the progress bar at the end.
const MIB_SHIFT: u32 = 20;

/// Starts the node's control socket, if a directory is usable.
fn serve_control_socket(state: &NodeState) -> Option<Server> {
    let service = Service {
        subject: state.clone(),
        routes: ROUTES,
    };
    let server = Directory::for_listening()
        .map_err(ServerError::from)
        .and_then(|directory| Server::start(&directory, Kind::Node, None, service));
    match server {
        Ok(server) => Some(server),
        Err(error) => {
            tracing::warn!(
                "`ssi-hv status` will not find this node: {:#}",
                anyhow!(error)
            );
            None
        }
    }
}

/// Lends memory until a signal stops it.
pub fn node(settings: &NodeSettings) -> Result<ExitCode, Failure> {
    let config = settings.parse()?;
    let report = config.report.as_deref().map(ReportFile::prepare);
    let report = report.transpose().map_err(Failure::usage)?;
    warn_of_little_memory(config.memory);
    // Before anything is lent, so that no signal ends the process in between.
    let (sender, orders) = mpsc::channel();
    watch_signals(sender.clone()).context("cannot watch for signals")?;
    if config.end_with_stdin {
        // No signal: where the kernel sends one too, that would be the second, which ends at once.
        let end = move || {
            // It may be ending already.
            let _ = sender.send(Order::Stop);
        };
        lifeline::watch_stdin(config.lease, end).context("cannot watch standard input")?;
    }
    let shown = config.credentials.as_deref();
    let shown = shown.map(|directory| credentials::load(directory, Role::Node));
    let shown = shown.transpose().map_err(Failure::usage)?;
    let daily = shown.clone().map(DailyWarning::start);
    let _daily = daily.transpose().context("cannot start a thread")?;
    let policy = config.allow.clone().map(Arc::new);
    let rules = policy.as_ref().map(|policy| policy.read());
    let rules = rules.transpose().map_err(Failure::usage)?;
    let donor_config = DonorConfig {
        listen: config.listen,
        memory_bytes: config.memory.bytes(),
        lease_duration_max: config.lease,
        spin: SPIN_DEFAULT,
        rdma: config.rdma.clone(),
        credentials: shown,
        allow: rules,
    };
    let cpus = (config.cpus > 0).then(|| {
        Arc::new(CpuHost::new(config.cpus, config.rdma_of_vms.clone())) as Arc<dyn CpuLender>
    });
    let rdma = RdmaUse {
        connections_max: config.rdma_connections,
        bytes_max: config.rdma_memory.map(ByteSize::bytes),
        settings: config.rdma_settings.clone(),
    };
    let donor = Donor::lending_cpus(&donor_config, rdma, cpus)?;
    let donor = Arc::new(donor);
    let state = NodeState {
        started: Instant::now(),
        donor: Arc::clone(&donor),
        policy,
        reloading: Arc::default(),
    };
    let metrics = metrics::serve(
        config.metrics,
        Service {
            subject: state.clone(),
            routes: METRICS,
        },
    )?;
    let server = serve_control_socket(&state);
    let membership = config.membership.as_ref();
    let registered = membership.map(|membership| register(&config, membership, &donor));
    let registered = registered.transpose().map_err(Failure::usage)?;
    if !config.listen.ip().is_loopback() && config.credentials.is_none() {
        tracing::warn!(
            "--insecure: any host that reaches {} can lease memory, and read and change memory of \
             VMs in transit; use it on a private network",
            donor.address()
        );
    }
    if let Some(credentials) = donor.credentials() {
        let current = credentials.current();
        print(&format!(
            "connections need certificates; this is {}\n",
            current.subject()
        ))?;
    }
    let listening = ready::listening(config.memory, donor.address());
    print(&(listening + "\n"))?;
    if let Some(fingerprint) = donor.fingerprint() {
        print(&(ready::fingerprint(&fingerprint) + "\n"))?;
    }
    if let Some((_, address)) = &metrics {
        print(&format!("metrics on http://{address}/metrics\n"))?;
    }
    notify_systemd(&donor, config.memory);

    loop {
        match orders.recv() {
            Ok(Order::Report) => write(report.as_ref(), &donor),
            Ok(Order::Reload) => reread(&state),
            Ok(Order::Stop) | Err(_) => break,
        }
    }
    // A stop by a signal is the normal end of a node, and counts as success.
    drop((server, metrics, registered));
    let leases = donor.pool().leases();
    if leases > 0 {
        tracing::warn!(leases, "VMs still had memory here; they lose it");
    }
    if let Some(report) = &report {
        report.write(&counters(&donor))?;
    }
    let pool = Arc::clone(donor.pool());
    let lent = pool.lent_bytes() >> MIB_SHIFT;
    let freed = move || lent.saturating_sub(pool.lent_bytes() >> MIB_SHIFT);
    let _progress = Followed::begin("freeing lent memory", lent, "MiB", freed);
    drop((state, donor));
    Ok(ExitCode::Success)
}

/// The meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Report,
    /// Read the credentials and the rules again.
    Reload,
    Stop,
}

/// Reads credentials and rules again; those in use stay when the new ones cannot be used.
fn reread(state: &NodeState) {
    match reload(state) {
        Ok(Some(_)) => {}
        Ok(None) => tracing::info!(
            "SIGHUP: nothing to read again, as the node has no credentials and no rules; SIGTERM \
             ends it"
        ),
        Err(error) => tracing::error!(
            "credentials and rules were not replaced: {:#}",
            anyhow!(error)
        ),
    }
}

/// Forwards signals. The second stop signal ends the process at once. SIGHUP is no stop signal, and
/// makes the node read its credentials and rules again.
fn watch_signals(sender: Sender<Order>) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGUSR1])?;
    let watch = move || {
        let mut stops = false;
        for signal in signals.forever() {
            let what = match signal {
                SIGUSR1 => Order::Report,
                SIGHUP => Order::Reload,
                SIGINT if stops => forced_end::at_once(ExitCode::Interrupted),
                _ if stops => forced_end::at_once(ExitCode::Terminated),
                _ => Order::Stop,
            };
            stops |= what == Order::Stop;
            // Best effort: a closed receiver means that the node is ending.
            let _ = sender.send(what);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(watch)?;
    Ok(())
}

/// Notifies the service manager, if it requested that, that the node is ready.
fn notify_systemd(donor: &Donor, memory: ByteSize) {
    let status = format!("lending {memory} on {}", donor.address());
    let state = [NotifyState::Ready, NotifyState::Status(&status)];
    if let Err(error) = sd_notify::notify(&state) {
        tracing::warn!("cannot notify systemd that the node is ready: {error}");
    }
}

fn write(report: Option<&ReportFile>, donor: &Donor) {
    if let Some(report) = report
        && let Err(error) = report.write(&counters(donor))
    {
        tracing::error!("{:#}", anyhow::anyhow!(error));
    }
}

/// Memory is allocated at its first write, so a lack of it would show late.
fn warn_of_little_memory(memory: ByteSize) {
    if let Some(available) = host::available_memory()
        && available < memory
    {
        tracing::warn!(
            "--memory {memory} is more than the {available} that this host has available; \
             VMs that use all of it may drive the host out of memory"
        );
    }
}
