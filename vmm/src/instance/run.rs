//! `ssi-hv run`.

use std::sync::Arc;
use std::time::Instant;

use memory_fabric::fabric::{DonorAddress, Fabric, OnLostMemory};

use super::console_file::ConsoleFile;
use super::devices::HostDevices;
use super::drains::VmDrains;
use super::exec::{self, Exec, console_file};
use super::links::{advice, describe, transport_used, unused};
use super::listen::listen;
use super::members::connected;
use super::memory::{
    connect, donor_shares, fabric_config, guest_memory, has_terminal, return_leases,
};
use super::metrics::OF_VM;
use super::nodes::OtherNodes;
use super::observe::{fill, fill_nodes, memory, rate_limits};
use super::run_error::RunError;
use super::sandbox::{self, Confinement};
use super::supervisor::Supervisor;
use super::timeline::Sampler;
use super::vm::{BootedVm, Instance};
use super::working_set::WorkingSet;
use super::{failing, follow, joining, lost_node, placing};
use crate::config::name::called;
use crate::config::{Choice as _, Numa, OnReboot, Placement, RunConfig, RunSettings, VcpuPolicy};
use crate::control_socket::route::Service;
use crate::exec::tail::Tail;
use crate::exit::ExitCode;
use crate::failure::{Failure, describe as describe_error};
use crate::lifeline;
use crate::machine::{
    Initrd, Machine, MachineConfig, MachineError, MachineHandle, Outcome, allowed_cpus,
    command_line, movable_parameter, node_parameters, tsc_khz,
};
use crate::membership::Members;
use crate::report::{Guest, Report, ReportFile};
use crate::size::ByteSize;
use crate::{host, metrics, stderr};

/// Boots a guest and waits for its end. With a command, returns the command's exit code.
pub fn run(settings: &RunSettings) -> Result<ExitCode, Failure> {
    let result = run_to_end(settings);
    match settings.exec {
        Some(_) => result.map_err(Failure::with_exec),
        None => result,
    }
}

fn run_to_end(settings: &RunSettings) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let delayed = stderr::Delayed::begin();
    let (with_donors, members) = Members::find(settings)?.unzip();
    let settings = with_donors.as_ref().unwrap_or(settings);
    let members = members.map(Arc::new);
    let config = &settings.parse()?;
    if let Some(warning) = config.unprotected() {
        tracing::warn!("{warning}");
    }
    let report_file = config.report.as_deref().map(ReportFile::prepare);
    let report_file = report_file.transpose().map_err(Failure::usage)?;
    // Before the sandbox: it asks the host's busybox what that can do.
    let exec = Exec::prepare(config);
    let confinement = &sandbox::enter(config).map_err(RunError::Sandbox)?;
    drop(delayed);
    let supervisor = Supervisor::start(config, report_file.clone())
        .map_err(RunError::host("watch for signals"))?;
    let mut report = Report::new(host::detect());
    report.guest = Guest {
        memory_bytes: config.memory.bytes(),
        cpus: config.cpus.into(),
        cpu_pinning: config.cpu_pinning.clone().map(|list| list.0),
        dedicated_cpus: config.dedicated_cpus,
        irqchip: config.irqchip.word().to_owned(),
        kernel: Some(config.kernel.display().to_string()),
    };
    let instance = Arc::new(Instance::new(
        vm_name(config),
        started,
        report.host.clone(),
        report.guest.clone(),
        config.clone(),
        Arc::clone(&supervisor),
    ));
    let (exec, mut result) = match exec {
        Ok(exec) => {
            let result = open_and_boot(
                config,
                members.as_ref(),
                confinement,
                &instance,
                exec.as_ref(),
                &mut report,
            );
            (exec, result)
        }
        Err(failure) => (None, Err(failure)),
    };
    let (end, errors) = supervisor.finish();
    report.errors = errors;
    if let Some(end) = end {
        // The supervisor's reason takes precedence over errors that it caused.
        result = match end.error {
            Some(error) => Err(Failure::new(end.code, RunError::Ended(error))),
            None => Ok(end.code),
        };
    }
    result = result.map_err(|failure| lost_node::with_losses(failure, &report.nodes));
    let code = match &result {
        Ok(code) => *code,
        Err(failure) => {
            report.errors.push(failure.one_line());
            failure.code()
        }
    };
    report.exec = exec.as_ref().map(Exec::report);
    report.outcome = code.name().to_owned();
    report.exit_code = match config.exec {
        Some(_) => code.with_exec().code(),
        None => code.code(),
    };
    if let Some(file) = report_file {
        let written = file.write(&report);
        // A failure of the run takes precedence over one of its report.
        if result.is_ok() {
            written?;
        } else if let Err(error) = written {
            tracing::error!("{}", describe_error(&error));
        }
    }
    result
}

/// Opens the host resources, boots the guest, and waits for its end. Failures are part of the
/// report.
fn open_and_boot(
    config: &RunConfig,
    members: Option<&Arc<Members>>,
    confinement: &Confinement<'_>,
    instance: &Arc<Instance>,
    exec: Option<&Exec>,
    report: &mut Report,
) -> Result<ExitCode, Failure> {
    let supervisor = &instance.supervisor;
    if let Some(fd) = config.end_with_fd {
        let supervisor = Arc::clone(supervisor);
        lifeline::watch_pipe(fd, move || supervisor.kill())
            .map_err(|source| RunError::EndWithFd { fd, source })?;
    }
    // First, so that the second of two VMs with one name does not touch the files of the first.
    let server = listen(config, instance)?;
    let metrics = metrics::serve(
        config.metrics,
        Service {
            subject: Arc::clone(instance),
            routes: OF_VM,
        },
    )?;
    if let Some((_, address)) = &metrics {
        tracing::info!("metrics on http://{address}/metrics");
    }
    if let Some(members) = members {
        members.follow()?;
        instance.note_cluster(members);
    }
    let console = console_file(config)?;
    let devices = HostDevices::open(config)?;
    let run = Run {
        config,
        members,
        confinement,
        supervisor,
        exec,
        console: console.as_ref(),
        instance,
    };
    let result = run.boot_until_it_ends(&devices, report);
    // From now on clients use the report.
    drop((server, metrics));
    result
}

/// A run with a valid configuration.
struct Run<'a> {
    config: &'a RunConfig,
    /// Where its donors come from, if that is an etcd.
    members: Option<&'a Arc<Members>>,
    confinement: &'a Confinement<'a>,
    supervisor: &'a Arc<Supervisor>,
    instance: &'a Instance,
    exec: Option<&'a Exec>,
    /// File for the guest's console, if it is not the terminal.
    console: Option<&'a ConsoleFile>,
}

impl Run<'_> {
    /// Boots the guest, and boots it again after each reboot, if so configured.
    fn boot_until_it_ends(
        &self,
        devices: &HostDevices,
        report: &mut Report,
    ) -> Result<ExitCode, Failure> {
        let mut begun = self.instance.started;
        let mut donors = None;
        loop {
            let (code, all_vcpus_ended) = self.boot(devices, begun, &mut donors, report)?;
            if code != ExitCode::GuestReboot || self.config.on_reboot == OnReboot::Exit {
                return Ok(code);
            }
            if !all_vcpus_ended {
                self.supervisor.note(
                    "the guest is not restarted: a thread of it still waits for a page or for its disk"
                        .to_owned(),
                );
                return Ok(code);
            }
            if !self.supervisor.prepare_restart() {
                return Ok(code);
            }
            if let Some(why) = sandbox::forbids_boot(self.config) {
                self.supervisor.note(why);
                return Ok(code);
            }
            begun = Instant::now();
            report.boot.restarts = self.instance.restart();
            tracing::info!("the guest reboots: start {}", report.boot.restarts + 1);
        }
    }

    /// Boots the guest and runs it to its end; fills the report. Returns the exit code, and whether
    /// the machine and its memory were released completely. `donors` replaces those of the
    /// configuration once some of these were drained.
    fn boot(
        &self,
        devices: &HostDevices,
        begun: Instant,
        donors: &mut Option<Vec<DonorAddress>>,
        report: &mut Report,
    ) -> Result<(ExitCode, bool), Failure> {
        let (config, supervisor) = (self.config, self.supervisor);
        let instance = self.instance;
        let mut fabric_config = fabric_config(config, donors.clone())?;
        if let Some(shown) = &fabric_config.credentials {
            let noted = instance.note_credentials(shown);
            noted.map_err(RunError::host("start a thread"))?;
        }
        let working_set = WorkingSet::prepare(config, &mut fabric_config)?;
        let shares = donor_shares(config, &fabric_config);
        let fabric = connected(
            config,
            self.members.map(Arc::as_ref),
            donors.is_some(),
            &mut fabric_config,
            |fabric_config| connect(config, fabric_config, shares.as_ref(), supervisor),
        )?;
        let replay =
            (has_terminal(config) && config.console.is_some()).then(|| working_set.follow(&fabric));
        let shown = fabric_config.credentials.as_ref();
        let started = OtherNodes::start(config, &fabric, shares.as_ref(), supervisor, shown)?;
        let (others, nodes) = started.unzip();
        let by_nodes = others.as_ref().map_or(0, OtherNodes::bytes_at_donors);
        tracing::info!("{}", describe(&fabric, by_nodes, config));
        let unused = unused(&fabric, by_nodes, config);
        let warnings = [unused, advice(&fabric), crowded(config)];
        for warning in warnings.into_iter().flatten() {
            tracing::warn!("{warning}");
        }
        let numa = match &others {
            Some(others) => others.numa(config),
            None => super::numa::nodes(config, &fabric),
        };
        let node = u16::try_from(numa.len()).ok();
        let node = node.and_then(|count| count.checked_sub(1));
        let limiters = devices.limiters();
        let shared = others.as_ref().map(OtherNodes::discards);
        let changes = &instance.hotplug_changes;
        let devices = devices.for_guest(config, &fabric, shared, node, changes);
        let booted = Arc::new(BootedVm::new(
            fabric.view().clone(),
            transport_used(&fabric),
            devices.balloon,
            devices.hotplug,
            VmDrains::new(&fabric, &fabric_config.donors, &supervisor.drain_changes),
            others.as_ref().map(OtherNodes::seen),
            limiters,
        ));
        instance.set_booted(Arc::clone(&booted));
        let parameters = &kernel_parameters(config)?;
        let sampler =
            Sampler::start(Arc::clone(fabric.stats())).map_err(RunError::host("start a thread"))?;
        let hotplug_bytes = config.hotplug_memory.map_or(0, ByteSize::bytes);
        let machine_config = MachineConfig {
            kernel: config.kernel.clone(),
            initrd: match self.exec {
                Some(exec) => Some(exec.initrd()),
                None => config.initrd.clone().map(Initrd::File),
            },
            cmdline: match self.exec {
                Some(exec) => exec.command_line(parameters),
                None => command_line(parameters),
            },
            cpus: config.cpus,
            pinning: config.cpu_pinning.clone().unwrap_or_default().0,
            dedicated_cpus: config.dedicated_cpus,
            irqchip: config.irqchip,
            hotplug_bytes,
            survives_lost_memory: is_poisoning(config, &fabric),
            devices: devices.devices,
            numa,
        };
        let memory = guest_memory(fabric.memory(), config.memory.bytes(), hotplug_bytes)?;
        let console = self.console.cloned();
        let tail = Tail::default();
        let console = match self.exec {
            Some(exec) => exec.console(console)?,
            None => exec::console(console, &tail),
        };
        let machine = match (&others, nodes) {
            (Some(others), Some(nodes)) => {
                others.machine(nodes, &machine_config, memory, console)?
            }
            _ => Machine::new(&machine_config, memory, console)?,
        };
        let handle = machine.handle();
        let watch = self.exec.map(|exec| exec.watch(handle.clone()));
        let watch = watch.transpose()?;
        self.confinement.complete()?;
        booted.set_machine(handle.clone(), begun.elapsed());
        if let Some(drains) = booted.drains.as_ref().filter(|_| config.drain_failing) {
            failing::start(drains).map_err(RunError::host("start a thread"))?;
        }
        let by_heat = config.placement == Placement::Heat;
        if let Some(drains) = booted.drains.as_ref().filter(|_| by_heat) {
            placing::start(drains).map_err(RunError::host("start a thread"))?;
        }
        if let (Some(drains), Some(members)) = (&booted.drains, self.members) {
            let started = joining::start(drains, members, config.donor_grace);
            started.map_err(RunError::host("start a thread"))?;
        }
        let follows = match (&others, config.vcpu_policy) {
            (Some(others), VcpuPolicy::Follow) => {
                let follows = follow::start(config, &others.seen(), &handle);
                Some(follows.map_err(RunError::host("start a thread"))?)
            }
            (None, VcpuPolicy::Follow) => {
                tracing::warn!(
                    "the VM is on this host alone: --vcpu-policy follow moves nothing without --node"
                );
                None
            }
            (_, VcpuPolicy::Static) => None,
        };
        let outcome = if supervisor.attend(handle.clone()) {
            machine.run()
        } else {
            Ok(Outcome::Stopped)
        };
        if let Err(error @ MachineError::DonorLost { .. }) = &outcome {
            // Before what follows from it: pages of that node do not come any more.
            supervisor.donor_lost(describe_error(error));
        }
        if outcome.is_ok() {
            supervisor.guest_ended();
        }
        if let Some(hotplug) = &booted.hotplug {
            hotplug.end();
        }
        if let Some(drains) = &booted.drains {
            let members = self.members.map(Arc::as_ref);
            *donors = drains.trusted_for_restart(members).or(donors.take());
            drains.end();
        }
        drop((watch, replay, follows));
        if let Some(error) = working_set.save(&fabric) {
            // The guest has run nevertheless.
            supervisor.note(error);
        }
        report.timeline = sampler.finish();
        let all_ended = handle.all_vcpus_ended();
        let init_ran = handle.time_to_init().is_some();
        let lost = others
            .and_then(|others| others.end(&outcome, all_ended, |event| handle.has_happened(event)));
        let all_vcpus_ended = finish(config, fabric, &handle, &booted, report);
        if let Some(lost) = lost {
            return Err(lost);
        }
        if let Some(exec) = self.exec {
            let code = exec.verdict(outcome, init_ran)?;
            return Ok((code, all_vcpus_ended));
        }
        let code = match outcome? {
            Outcome::Shutdown => ExitCode::Success,
            Outcome::Reboot => ExitCode::GuestReboot,
            // The console's escape sequence; other reasons come from the supervisor.
            Outcome::Stopped => ExitCode::Interrupted,
            Outcome::Crash(detail) => {
                let detail = match tail.panic() {
                    Some(line) => format!("{detail}; its console says: {line}"),
                    None => detail,
                };
                return Err(Failure::new(ExitCode::GuestCrash, RunError::Crash(detail)));
            }
        };
        Ok((code, all_vcpus_ended))
    }
}

/// Returns whether lost pages are poisoned: where there are donors that can be lost.
fn is_poisoning(config: &RunConfig, fabric: &Fabric) -> bool {
    config.on_lost_memory == OnLostMemory::Poison && fabric.nodes().len() > 1
}

/// Returns the kernel parameters beside the default ones of every machine.
fn kernel_parameters(config: &RunConfig) -> Result<String, MachineError> {
    let given = &config.kernel_parameters;
    if config.on_lost_memory == OnLostMemory::Poison && config.numa == Numa::Expose {
        return Ok(movable_parameter(given) + given);
    }
    if config.nodes.is_empty() {
        return Ok(given.clone());
    }
    let elsewhere: u32 = config.nodes.iter().map(|node| u32::from(node.cpus)).sum();
    let cpus = u32::from(config.cpus);
    let here = cpus.saturating_sub(elsewhere);
    let added = node_parameters(given, Some(tsc_khz()?), here, cpus);
    if !added.is_empty() {
        tracing::info!(
            "kernel parameters for vCPUs on several hosts: {}",
            added.trim_end()
        );
    }
    Ok(added + given)
}

/// Describes dedicated CPUs that leave none for the pager.
fn crowded(config: &RunConfig) -> Option<String> {
    let dedicated = config.cpu_pinning.as_ref();
    let dedicated = dedicated.filter(|_| config.dedicated_cpus)?;
    let allowed = allowed_cpus().ok()?;
    let is_dedicated = |cpu: &u32| dedicated.0.contains(cpu);
    allowed.iter().all(is_dedicated).then(|| {
        format!(
            "--dedicated-cpus has all {} CPU(s) that this process may use, so that page faults wait \
             for halted vCPUs; dedicate fewer, or have more allowed (taskset, cpuset)",
            allowed.len()
        )
    })
}

/// Returns the name of the VM for donors and clients.
fn vm_name(config: &RunConfig) -> String {
    called(config.name.as_ref(), std::process::id())
}

/// Stops the fabric and reports its counters. Returns false if the fabric must not be stopped.
///
/// The machine is held until memory has ended: the end of KVM's virtual machine waits for its
/// kernel threads, and these may wait for a page until then.
fn finish(
    config: &RunConfig,
    fabric: Fabric,
    machine: &MachineHandle,
    booted: &BootedVm,
    report: &mut Report,
) -> bool {
    report.boot.to_init_ms = booted.time_to_init_ms();
    report.memory = memory(fabric.view(), true, booted.machine_checks());
    report.transport = transport_used(&fabric);
    let stats = Arc::clone(fabric.stats());
    let view = fabric.view().clone();
    let all_vcpus_ended = machine.all_vcpus_ended();
    let summaries = if all_vcpus_ended {
        return_leases(config, fabric)
    } else {
        // A vCPU or a device waits for a page, or may access one later. It must get its bytes or
        // never continue. The fabric therefore stays until the process ends, which follows: all
        // threads end before the userfaultfd is closed.
        let summaries = fabric.nodes();
        std::mem::forget(fabric);
        summaries
    };
    fill(report, &summaries, &view);
    fill_nodes(report, booted);
    report.rate_limits = rate_limits(booted);
    tracing::debug!(
        replayed = stats.replayed.get(),
        stalled_for_memory = stats.stalled_for_memory.get(),
        evictions_clean = stats.evictions_clean.get(),
        evictions_zero = stats.evictions_zero.get(),
        evictions_unchanged = stats.evictions_unchanged.get(),
        evictions_cancelled = stats.evictions_cancelled.get(),
        write_protect = stats.write_protect.summary().count,
        "pager"
    );
    all_vcpus_ended
}
