//! What `ssi-hv run` is asked for: one structure for its flags and for `vm.toml`.

use std::path::PathBuf;

use memory_fabric::fabric::{Compression, OnLostMemory, TransportKind};
use serde::{Deserialize, Serialize};

use super::address::{Donor, HostPort};
use super::choice::{self, HugePages, Numa, OnReboot, Placement, Prefetching, Switch, VcpuPolicy};
use super::cpu_list::CpuList;
use super::disk::DiskArg;
use super::name::VmName;
use super::net::NetArg;
use super::node_arg::NodeArg;
use super::rdma::RdmaArg;
use super::stripes::StripesArg;
use super::vsock::VsockArg;
use super::{DEFAULT_DONOR_GRACE_SECONDS, DEFAULT_MEMORY};
use crate::machine::Irqchip;
use crate::size::ByteSize;

/// What a user asks of `ssi-hv run`, by flags and `vm.toml`: each value well-formed, and not yet
/// compared with limits, this host, or other values.
///
/// A key of the file has the name of the flag without its dashes: `local-memory = "256M"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RunSettings {
    /// Name of the VM [default: ssi-hv-PID]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<VmName>,
    /// Kernel to boot: an ELF vmlinux or a bzImage
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// Initial RAM disk
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// Run this command; return its output and exit code
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<String>,
    /// Stop the guest after this time, with exit code 124
    #[serde(rename = "timeout", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
    /// Write the guest's console to a file
    #[serde(skip_serializing_if = "Option::is_none")]
    pub console: Option<PathBuf>,
    /// Kernel parameters, appended to the default ones
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cmdline: String,
    /// Virtual CPUs, 1 to 254
    pub cpus: u32,
    /// Host CPUs to pin to, one for each vCPU: 2-5 or 0,0,1
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_pinning: Option<CpuList>,
    /// Let halted vCPUs keep the CPUs of cpu-pinning
    pub dedicated_cpus: bool,
    /// Where the guest's interrupt controllers are: kernel or user
    #[serde(with = "choice::optional", skip_serializing_if = "Option::is_none")]
    pub irqchip: Option<Irqchip>,
    /// Memory of the guest
    pub memory: ByteSize,
    /// Limit of memory that is added at run time
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hotplug_memory: Option<ByteSize>,
    /// Let the guest report free memory
    #[serde(with = "choice")]
    pub balloon: Switch,
    /// A disk, path=FILE[,readonly][,raw]: a raw image or a block device; repeatable
    #[serde(rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskArg>,
    /// A network card on a tap, tap=NAME[,mac=MAC]; repeatable
    #[serde(rename = "net", skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<NetArg>,
    /// Sockets between guest and host, cid=N,path=SOCKET
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vsock: Option<VsockArg>,
    /// A second console, /dev/hvc0, on a Unix socket
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hvc: Option<PathBuf>,
    /// Provide random numbers of the host
    #[serde(with = "choice")]
    pub rng: Switch,
    /// What to do when the guest reboots
    #[serde(with = "choice")]
    pub on_reboot: OnReboot,
    /// Local memory [default: all, or what donors with memory= leave]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_memory: Option<ByteSize>,
    /// A donor, HOST:PORT[,memory=SIZE][,name=NAME][,zone=ZONE][,fingerprint=HEX]; repeatable
    #[serde(rename = "donor", skip_serializing_if = "Vec::is_empty")]
    pub donors: Vec<Donor>,
    /// Copies of each page on donors, each on another one: 1 or 2
    pub replicas: u32,
    /// Each page in pieces on donors, K of data and M of parity, of which M may be lost: K+M
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redundancy: Option<StripesArg>,
    /// A node that runs vCPUs, HOST:PORT,cpus=N; repeatable
    #[serde(rename = "node", skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeArg>,
    /// Running nodes as donors, from the file of `ssi-hv up`, or etcd://HOST:PORT
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<PathBuf>,
    /// Directory with the certificate for etcd, and its authority
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_credentials: Option<PathBuf>,
    /// How pages travel
    #[serde(with = "choice")]
    pub transport: TransportKind,
    /// RDMA settings, KEY=VALUE,... or a table
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaArg>,
    /// What the guest sees of where its memory is
    #[serde(with = "choice")]
    pub numa: Numa,
    /// Huge pages for memory with its home here: auto or off
    #[serde(with = "choice")]
    pub huge_pages: HugePages,
    /// Protect each page in transit with a CRC-32C
    pub checksum: bool,
    /// Seal pages on donors: on or off
    #[serde(with = "choice::optional", skip_serializing_if = "Option::is_none")]
    pub seal: Option<Switch>,
    /// Compress pages on the network
    #[serde(with = "choice")]
    pub compression: Compression,
    /// Fetch pages before they are touched
    #[serde(with = "choice")]
    pub prefetch: Prefetching,
    /// Write which pages the guest touched first
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record_working_set: Option<PathBuf>,
    /// Prepare what a recorded run touched first
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay_working_set: Option<PathBuf>,
    /// Pause this long for a lost donor
    #[serde(rename = "donor-grace")]
    pub donor_grace_seconds: u32,
    /// What to do when memory is lost with a donor: end or poison
    #[serde(with = "choice")]
    pub on_lost_memory: OnLostMemory,
    /// Drain a donor that fails again and again
    #[serde(with = "choice")]
    pub drain_failing: Switch,
    /// Where on donors memory is
    #[serde(with = "choice")]
    pub placement: Placement,
    /// Directory of this VM's certificate
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
    /// Allow other hosts, without encryption
    pub insecure: bool,
    /// Whether other addresses are reached by a network of this host alone, which no file can say
    #[serde(skip)]
    pub stays_on_this_host: bool,
    /// Serve Prometheus metrics on this address, at /metrics; port 0 selects a free port
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<HostPort>,
    /// Restrict the VM's process to what it needs
    #[serde(with = "choice")]
    pub sandbox: Switch,
    /// Become this user before the guest runs: a name, or UID:GID
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Make this directory the root before the guest runs
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chroot: Option<PathBuf>,
    /// Let nodes write page tables of the kernel at the same time: on or off
    #[serde(with = "choice")]
    pub merge_tables: Switch,
    /// Which vCPUs move between nodes without a command: static or follow
    #[serde(with = "choice")]
    pub vcpu_policy: VcpuPolicy,
    /// Write a report in JSON at the end
    #[serde(skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
    /// End when the other end of this pipe is closed: `ssi-hv up` starts VMs with it
    #[serde(skip)]
    pub end_with_fd: Option<u32>,
}

impl Default for RunSettings {
    fn default() -> Self {
        Self {
            name: None,
            kernel: None,
            initrd: None,
            exec: None,
            timeout_seconds: None,
            console: None,
            cmdline: String::new(),
            cpus: 1,
            cpu_pinning: None,
            dedicated_cpus: false,
            irqchip: None,
            memory: DEFAULT_MEMORY,
            hotplug_memory: None,
            balloon: Switch::On,
            disks: Vec::new(),
            nets: Vec::new(),
            vsock: None,
            hvc: None,
            rng: Switch::On,
            on_reboot: OnReboot::Exit,
            local_memory: None,
            donors: Vec::new(),
            replicas: 1,
            redundancy: None,
            nodes: Vec::new(),
            cluster: None,
            cluster_credentials: None,
            transport: TransportKind::Auto,
            rdma: None,
            numa: Numa::Flat,
            huge_pages: HugePages::Auto,
            checksum: false,
            seal: None,
            compression: Compression::Auto,
            prefetch: Prefetching::Auto,
            record_working_set: None,
            replay_working_set: None,
            donor_grace_seconds: DEFAULT_DONOR_GRACE_SECONDS,
            on_lost_memory: OnLostMemory::End,
            drain_failing: Switch::Off,
            placement: Placement::Static,
            credentials: None,
            insecure: false,
            stays_on_this_host: false,
            metrics: None,
            sandbox: Switch::On,
            user: None,
            chroot: None,
            merge_tables: Switch::Off,
            vcpu_policy: VcpuPolicy::Static,
            report: None,
            end_with_fd: None,
        }
    }
}
