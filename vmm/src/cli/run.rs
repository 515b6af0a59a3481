//! `ssi-hv run`: its flags.

use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command};
use memory_fabric::fabric::{Compression, OnLostMemory, TransportKind};
use ssi_hv::config::address::{Donor, HostPort};
use ssi_hv::config::cpu_list::CpuList;
use ssi_hv::config::disk::DiskArg;
use ssi_hv::config::file::{self, ConfigFileError};
use ssi_hv::config::name::VmName;
use ssi_hv::config::net::NetArg;
use ssi_hv::config::node_arg::NodeArg;
use ssi_hv::config::rdma::RdmaArg;
use ssi_hv::config::stripes::StripesArg;
use ssi_hv::config::vsock::VsockArg;
use ssi_hv::config::{
    DEFAULT_DONOR_GRACE_SECONDS, HugePages, Numa, OnReboot, Placement, Prefetching, RunSettings,
    Switch, VcpuPolicy,
};
use ssi_hv::machine::Irqchip;
use ssi_hv::size::ByteSize;
use toml::{Table, Value};

use super::words;

/// The flags of `run`: the settings, and where else to take them from.
#[derive(Clone, Debug, Args)]
pub(super) struct RunArgs {
    /// Name of the VM [default: ssi-hv-PID]
    #[arg(long, value_name = "NAME", help_heading = "Guest")]
    name: Option<VmName>,

    /// Kernel to boot: an ELF vmlinux or a bzImage
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    kernel: Option<PathBuf>,

    /// Initial RAM disk
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    initrd: Option<PathBuf>,

    /// Run this command; return its output and exit code
    #[arg(
        long,
        value_name = "COMMAND",
        help_heading = "Guest",
        allow_hyphen_values = true
    )]
    exec: Option<String>,

    /// Stop the guest after this time, with exit code 124
    #[arg(long = "timeout", value_name = "SECONDS", help_heading = "Guest")]
    timeout_seconds: Option<u32>,

    /// Write the guest's console to a file
    #[arg(long, value_name = "FILE", help_heading = "Guest")]
    console: Option<PathBuf>,

    /// Kernel parameters, appended to the default ones
    #[arg(
        long,
        value_name = "STRING",
        help_heading = "Guest",
        default_value = "",
        hide_default_value = true,
        allow_hyphen_values = true
    )]
    cmdline: String,

    /// Virtual CPUs, 1 to 254
    #[arg(long, value_name = "N", help_heading = "Guest", default_value_t = 1)]
    cpus: u32,

    /// Host CPUs to pin to, one for each vCPU: 2-5 or 0,0,1
    #[arg(long, value_name = "CPUS", help_heading = "Guest")]
    cpu_pinning: Option<CpuList>,

    /// Let halted vCPUs keep the CPUs of --cpu-pinning
    #[arg(long, help_heading = "Guest")]
    dedicated_cpus: bool,

    /// Interrupt control: kernel or user [default: kernel]
    #[arg(
        long,
        value_name = "WHERE",
        help_heading = "Guest",
        value_parser = words::<Irqchip>(),
        hide_possible_values = true,
    )]
    irqchip: Option<Irqchip>,

    /// Memory of the guest
    #[arg(
        long,
        value_name = "SIZE",
        help_heading = "Guest",
        default_value = "1G"
    )]
    memory: ByteSize,

    /// Limit of memory that is added at run time
    #[arg(long, value_name = "SIZE", help_heading = "Where the memory is")]
    hotplug_memory: Option<ByteSize>,

    /// Let the guest report free memory
    #[arg(
        long,
        value_name = "on|off",
        help_heading = "Guest",
        value_parser = words::<Switch>(),
        default_value = "on",
        hide_possible_values = true
    )]
    balloon: Switch,

    /// A disk, path=FILE[,readonly][,raw]...; repeatable
    #[arg(long = "disk", value_name = "DISK", help_heading = "Guest")]
    disks: Vec<DiskArg>,

    /// A network card, tap=NAME[,mac=MAC]...; repeatable
    #[arg(long = "net", value_name = "NET", help_heading = "Guest")]
    nets: Vec<NetArg>,

    /// Sockets to the host, cid=N,path=SOCKET
    #[arg(long, value_name = "VSOCK", help_heading = "Guest")]
    vsock: Option<VsockArg>,

    /// A second console, /dev/hvc0, on a Unix socket
    #[arg(long, value_name = "SOCKET", help_heading = "Guest")]
    hvc: Option<PathBuf>,

    /// Provide random numbers of the host
    #[arg(
        long,
        value_name = "on|off",
        help_heading = "Guest",
        value_parser = words::<Switch>(),
        default_value = "on",
        hide_possible_values = true
    )]
    rng: Switch,

    /// On a reboot: exit or restart [default: exit]
    #[arg(
        long,
        value_name = "WHAT",
        help_heading = "Guest",
        value_parser = words::<OnReboot>(),
        default_value = "exit",
        hide_possible_values = true,
        hide_default_value = true
    )]
    on_reboot: OnReboot,

    /// Local memory [default: what donors leave]
    #[arg(long, value_name = "SIZE", help_heading = "Where the memory is")]
    local_memory: Option<ByteSize>,

    /// HOST:PORT[,memory=SIZE][,name=NAME]...
    #[arg(
        long = "donor",
        value_name = "DONOR",
        help_heading = "Where the memory is"
    )]
    donors: Vec<Donor>,

    /// Copies of a page on donors: 1 or 2 [default: 1]
    #[arg(
        long,
        value_name = "N",
        help_heading = "Where the memory is",
        default_value_t = 1,
        hide_default_value = true
    )]
    replicas: u32,

    /// Each page in K pieces of data and M of parity, on K+M donors, of which M may be lost: K is 2, 4
    /// or 8, M 1 or 2. Hidden: docs/redundancy.md says what it costs
    #[arg(long, value_name = "K+M", hide = true)]
    redundancy: Option<StripesArg>,

    /// HOST:PORT,cpus=N[,memory=SIZE]...; repeatable
    #[arg(long = "node", value_name = "NODE", help_heading = "Guest")]
    nodes: Vec<NodeArg>,

    /// Use the running nodes of a cluster.toml or etcd
    #[arg(long, value_name = "FILE", help_heading = "Where the memory is")]
    cluster: Option<PathBuf>,

    /// Directory with ca.pem, cert.pem and key.pem for the etcd of --cluster. Hidden: docs/cluster.md
    #[arg(long, value_name = "DIR", hide = true)]
    cluster_credentials: Option<PathBuf>,

    /// auto (default), rdma, hybrid, tcp, udp, loopback
    #[arg(
        long,
        value_name = "KIND",
        help_heading = "Where the memory is",
        value_parser = words::<TransportKind>(),
        default_value = "auto",
        hide_possible_values = true,
        hide_default_value = true,
    )]
    transport: TransportKind,

    /// Settings of RDMA connections, KEY=VALUE,... Hidden: the defaults fit, and docs/cli.md has the
    /// keys
    #[arg(long, value_name = "SETTINGS", hide = true)]
    rdma: Option<RdmaArg>,

    /// The guest's view: flat or expose
    #[arg(
        long,
        value_name = "KIND",
        help_heading = "Where the memory is",
        value_parser = words::<Numa>(),
        default_value = "flat",
        hide_possible_values = true,
    )]
    numa: Numa,

    /// Local huge pages: auto or off
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_parser = words::<HugePages>(),
        default_value = "auto",
        hide_possible_values = true,
    )]
    huge_pages: HugePages,

    /// Protect each page in transit with a CRC-32C
    #[arg(long, help_heading = "Where the memory is")]
    checksum: bool,

    /// Encrypt pages: on or off [default: by host]
    #[arg(
        long,
        value_name = "on|off",
        help_heading = "Where the memory is",
        value_parser = words::<Switch>(),
        hide_possible_values = true,
    )]
    seal: Option<Switch>,

    /// Compress pages: auto, on or off
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_parser = words::<Compression>(),
        default_value = "auto",
        hide_possible_values = true,
    )]
    compression: Compression,

    /// Fetch pages ahead: auto or off
    #[arg(
        long,
        value_name = "WHEN",
        help_heading = "Where the memory is",
        value_parser = words::<Prefetching>(),
        default_value = "auto",
        hide_possible_values = true,
    )]
    prefetch: Prefetching,

    /// Write which pages the guest touched first
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    record_working_set: Option<PathBuf>,

    /// Prepare what a recorded run touched first
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    replay_working_set: Option<PathBuf>,

    /// Pause this long for a lost donor
    #[arg(
        long = "donor-grace",
        value_name = "SECONDS",
        help_heading = "Where the memory is",
        default_value_t = DEFAULT_DONOR_GRACE_SECONDS
    )]
    donor_grace_seconds: u32,

    /// End the VM when memory is lost with a donor, or poison the lost pages. Hidden:
    /// docs/replicas.md says what a guest needs for it
    #[arg(
        long,
        value_name = "end|poison",
        value_parser = words::<OnLostMemory>(),
        default_value = "end",
        hide = true
    )]
    on_lost_memory: OnLostMemory,

    /// Drain donors whose connections fail 5 times in 10 minutes
    #[arg(
        long,
        value_name = "on|off",
        value_parser = words::<Switch>(),
        default_value = "off",
        hide = true
    )]
    drain_failing: Switch,

    /// Whether hot memory moves to fast donors
    #[arg(
        long,
        value_name = "static|heat",
        value_parser = words::<Placement>(),
        default_value = "static",
        hide = true
    )]
    placement: Placement,

    /// This VM's certificate, for named donors
    #[arg(long, value_name = "DIR", help_heading = "Where the memory is")]
    credentials: Option<PathBuf>,

    /// Allow other hosts, without encryption
    #[arg(long, help_heading = "Where the memory is")]
    insecure: bool,

    /// Serve Prometheus metrics, at /metrics
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Files")]
    metrics: Option<HostPort>,

    /// Restrict the VM's process to what it needs. Hidden: only a defect of the sandbox is a reason
    /// to turn it off, and its errors name the flag
    #[arg(
        long,
        value_name = "on|off",
        value_parser = words::<Switch>(),
        default_value = "on",
        hide = true
    )]
    sandbox: Switch,

    /// Become this user before the guest runs. Hidden: for services, and docs/cli.md says what it
    /// needs
    #[arg(long, value_name = "USER", hide = true)]
    user: Option<String>,

    /// Make this directory the root before the guest runs. Hidden: as --user
    #[arg(long, value_name = "DIR", hide = true)]
    chroot: Option<PathBuf>,

    /// Let nodes write page tables of the guest's kernel at the same time. Hidden: an experiment
    #[arg(
        long,
        value_name = "on|off",
        value_parser = words::<Switch>(),
        default_value = "off",
        hide = true
    )]
    merge_tables: Switch,

    /// Which vCPUs move between nodes without a command. Hidden: docs/ssi.md says when it helps
    #[arg(
        long,
        value_name = "static|follow",
        value_parser = words::<VcpuPolicy>(),
        default_value = "static",
        hide = true
    )]
    vcpu_policy: VcpuPolicy,

    /// Write a report in JSON at the end
    #[arg(long, value_name = "FILE", help_heading = "Files")]
    report: Option<PathBuf>,

    /// End when the other end of this pipe is closed: `ssi-hv up` starts VMs with it
    #[arg(long, value_name = "FD", hide = true)]
    end_with_fd: Option<u32>,

    /// Take flags that are not given from a file
    #[arg(long = "config", value_name = "VM.TOML", help_heading = "Files")]
    pub(super) file: Option<PathBuf>,

    /// Print the resulting configuration and exit
    #[arg(long, help_heading = "Files")]
    pub(super) print_config: bool,
}

impl RunArgs {
    /// The settings: those of the flags, laid over those of the file, with the donors of a cluster.
    ///
    /// `matches` are those of the `run` command, which know what was given.
    pub(super) fn settings(self, matches: &ArgMatches) -> Result<RunSettings, ConfigFileError> {
        let file = self.file.clone();
        let flags = self.into_settings();
        let Some(path) = file else {
            return Ok(flags);
        };
        let values = file::to_table(&flags)?;
        let mut given = Table::new();
        for arg in Self::augment_args(Command::new("run")).get_arguments() {
            let source = matches.value_source(arg.get_id().as_str());
            let key = arg.get_long().unwrap_or_default();
            // An empty text has no value in the table, and replaces that of the file all the same.
            let empty = || (key == "cmdline").then(|| Value::String(String::new()));
            let value = values.get(key).cloned().or_else(empty);
            if let (Some(ValueSource::CommandLine), Some(value)) = (source, value) {
                given.insert(key.to_owned(), value);
            }
        }
        let mut settings = RunSettings::read(&path, given)?;
        // No key of a file.
        settings.end_with_fd = flags.end_with_fd;
        Ok(settings)
    }

    fn into_settings(self) -> RunSettings {
        RunSettings {
            name: self.name,
            kernel: self.kernel,
            initrd: self.initrd,
            exec: self.exec,
            timeout_seconds: self.timeout_seconds,
            console: self.console,
            cmdline: self.cmdline,
            cpus: self.cpus,
            cpu_pinning: self.cpu_pinning,
            dedicated_cpus: self.dedicated_cpus,
            irqchip: self.irqchip,
            memory: self.memory,
            hotplug_memory: self.hotplug_memory,
            balloon: self.balloon,
            disks: self.disks,
            nets: self.nets,
            vsock: self.vsock,
            hvc: self.hvc,
            rng: self.rng,
            on_reboot: self.on_reboot,
            local_memory: self.local_memory,
            donors: self.donors,
            replicas: self.replicas,
            redundancy: self.redundancy,
            nodes: self.nodes,
            cluster: self.cluster,
            cluster_credentials: self.cluster_credentials,
            transport: self.transport,
            rdma: self.rdma,
            numa: self.numa,
            huge_pages: self.huge_pages,
            checksum: self.checksum,
            seal: self.seal,
            compression: self.compression,
            prefetch: self.prefetch,
            record_working_set: self.record_working_set,
            replay_working_set: self.replay_working_set,
            donor_grace_seconds: self.donor_grace_seconds,
            on_lost_memory: self.on_lost_memory,
            drain_failing: self.drain_failing,
            placement: self.placement,
            credentials: self.credentials,
            insecure: self.insecure,
            stays_on_this_host: false,
            metrics: self.metrics,
            sandbox: self.sandbox,
            user: self.user,
            chroot: self.chroot,
            merge_tables: self.merge_tables,
            vcpu_policy: self.vcpu_policy,
            report: self.report,
            end_with_fd: self.end_with_fd,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_file_has_the_flags_as_keys_but_those_that_are_about_files() {
        let mut flags: BTreeSet<String> = RunArgs::augment_args(Command::new("run"))
            .get_arguments()
            .filter_map(|arg| arg.get_long().map(str::to_owned))
            .collect();
        // The last one ties a VM to the `up` that starts it.
        for flag in ["config", "print-config", "end-with-fd"] {
            assert!(flags.remove(flag), "{flag}");
        }
        assert_eq!(file::keys_of::<RunSettings>(), flags);
    }
}
