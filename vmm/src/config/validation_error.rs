//! Why a well-formed value cannot be used.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use fabric_identity::Name;

use super::address::HostPort;
use super::cpu_list::CpuList;
use super::membership::MembershipError;
use super::node_arg::NODES_MAX;
use super::policy::PolicyError;
use super::privileges::PrivilegesError;
use super::redundancy_error::RedundancyError;
use crate::config::{DONORS_MAX, PAGE_SIZE_BYTES};
use crate::exec::frame::COMMAND_BYTES_MAX;
use crate::size::ByteSize;

/// Why a configuration cannot be run: value, limit and remedy in one line.
#[derive(Debug, thiserror::Error)]
pub enum ValidationError {
    /// No kernel was named.
    #[error("no kernel given; add --kernel FILE, an ELF vmlinux or a bzImage")]
    KernelNotGiven,
    /// A file cannot be opened.
    #[error("cannot open {flag} {}; name a file that exists and that you may read", path.display())]
    FileNotReadable {
        /// The flag that named it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is empty, or not a file.
    #[error("{flag} {} is {found}; name a file with contents", path.display())]
    FileNotUsable {
        /// The flag that named it.
        flag: &'static str,
        /// The path.
        path: PathBuf,
        /// What it is instead.
        found: &'static str,
    },
    /// A command that cannot be passed to a guest.
    #[error(
        "--exec has {found}; give a command of 1 to {COMMAND_BYTES_MAX} bytes, without zero bytes, or put a script on a --disk or in the --initrd"
    )]
    CommandUnusable {
        /// The problem.
        found: String,
    },
    /// Kernel parameters with an invalid byte.
    #[error("--cmdline has the byte {byte:#04x} at position {position}; give printable ASCII")]
    CmdlineByte {
        /// The first invalid byte.
        byte: u8,
        /// Its position, from 0.
        position: usize,
    },
    /// Kernel parameters that exceed the limit.
    #[error(
        "--cmdline has {bytes} bytes, {limit} is the limit beside the default parameters; shorten it"
    )]
    CmdlineTooLong {
        /// Their length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A number is outside its range.
    #[error("{flag} {value} is outside {min} to {max}; choose a number in that range")]
    OutOfRange {
        /// The flag.
        flag: &'static str,
        /// What was given.
        value: u64,
        /// The minimum.
        min: u64,
        /// The maximum.
        max: u64,
    },
    /// The number of pinned CPUs differs from the number of vCPUs.
    #[error(
        "--cpu-pinning names {named} CPU(s) for the {cpus} vCPU(s) of --cpus; name one for each, in their order, such as 2-5 for four"
    )]
    PinningCount {
        /// Number of CPUs named.
        named: usize,
        /// Number of vCPUs.
        cpus: u32,
    },
    /// A host CPU that does not exist, or that this process may not use.
    #[error(
        "--cpu-pinning names CPU {cpu}, which is absent or not allowed for this process; name CPUs of {allowed}, or have more of them allowed (taskset, cpuset)"
    )]
    PinningNotAllowed {
        /// The first such CPU.
        cpu: u32,
        /// The allowed CPUs.
        allowed: CpuList,
    },
    /// Dedicated CPUs that are not named.
    #[error(
        "--dedicated-cpus needs a CPU of this host for each of the {cpus} vCPU(s) of --cpus; name them with --cpu-pinning, such as 2-5 for four"
    )]
    DedicatedNotPinned {
        /// Number of vCPUs.
        cpus: u32,
    },
    /// One dedicated CPU for several vCPUs.
    #[error(
        "--dedicated-cpus: --cpu-pinning names CPU {cpu} for {times} vCPUs, of which a halted one would delay the others; name {times} distinct CPUs, or omit --dedicated-cpus"
    )]
    DedicatedTwice {
        /// The first such CPU.
        cpu: u32,
        /// How many vCPUs have it.
        times: usize,
    },
    /// Dedicated CPUs with interrupt controllers that need exits.
    #[error(
        "--dedicated-cpus cannot be combined with --irqchip user, whose vCPUs sleep in this process; omit one of the two"
    )]
    DedicatedWithUserIrqchip,
    /// The kernel does not report the allowed CPUs.
    #[error("cannot find out for --cpu-pinning which CPUs are allowed; leave the flag away")]
    PinningUnknown(#[source] io::Error),
    /// More nodes with vCPUs than are allowed.
    #[error(
        "too many nodes: {count} given, {NODES_MAX} is the limit; ask fewer for more vCPUs each"
    )]
    TooManyNodes {
        /// Number of nodes.
        count: usize,
    },
    /// No vCPU is left for this host.
    #[error(
        "the nodes of --node run {elsewhere} vCPU(s), which are all {cpus} vCPUs of --cpus or more; at least one has to be on this host: raise --cpus, or ask for fewer"
    )]
    NodesTakeAllCpus {
        /// Number of vCPUs.
        cpus: u32,
        /// Number of those on nodes.
        elsewhere: u32,
    },
    /// Two nodes have the same address.
    #[error("node {second} is the same as {first}, at {address}; name each node once")]
    DuplicateNode {
        /// The first of them.
        first: HostPort,
        /// The second.
        second: HostPort,
        /// The address of both.
        address: SocketAddr,
    },
    /// A flag that a VM on several nodes cannot have.
    #[error("{flag} cannot be used with --node; remove one of them")]
    NotWithNodes {
        /// The flag.
        flag: &'static str,
    },
    /// Privileges cannot be given up, or something needs them later.
    #[error(transparent)]
    Privileges(#[from] PrivilegesError),
    /// A size is not whole pages.
    #[error(
        "{flag} {size} is not a multiple of the page size, {PAGE_SIZE_BYTES} bytes; {below} is the next lower one"
    )]
    NotWholePages {
        /// The flag.
        flag: &'static str,
        /// What was given.
        size: ByteSize,
        /// The next lower valid size.
        below: ByteSize,
    },
    /// A size is not whole blocks.
    #[error("{flag} {size} is not a multiple of 2M; choose 2M or a multiple of it")]
    NotWholeBlocks {
        /// The flag.
        flag: &'static str,
        /// What was given.
        size: ByteSize,
    },
    /// This host, the nodes and the donors lend too little.
    #[error(
        "guest memory of {memory}{with_added} is more than --local-memory {local} and the {lent} that --node and --donor lend{in_copies}; raise --local-memory or memory= of one of these by {missing}, or lower --memory"
    )]
    NodesLendTooLittle {
        /// The guest's memory, with what may be added.
        memory: ByteSize,
        /// That it contains what may be added, if it does.
        with_added: &'static str,
        /// What this host lends.
        local: ByteSize,
        /// What the nodes lend, and the donors lend or can hold in two copies.
        lent: ByteSize,
        /// That it is two copies, if it is.
        in_copies: &'static str,
        /// What is missing.
        missing: ByteSize,
    },
    /// A node is asked for more than the guest has.
    #[error("node {node} is to lend {size}, more than {flags} {memory}; lower memory= of the node")]
    NodeAboveMemory {
        /// The node.
        node: HostPort,
        /// What was given.
        size: ByteSize,
        /// The flags of the guest's memory.
        flags: &'static str,
        /// The guest's memory, with what may be added.
        memory: ByteSize,
    },
    /// A size is below the minimum.
    #[error("{flag} {size} is too small; {limit} is the least")]
    TooSmall {
        /// The flag.
        flag: &'static str,
        /// What was given.
        size: ByteSize,
        /// The minimum.
        limit: ByteSize,
    },
    /// A size exceeds the maximum.
    #[error("{flag} {size} is too large; {limit} is the most")]
    TooLarge {
        /// The flag.
        flag: &'static str,
        /// What was given.
        size: ByteSize,
        /// The maximum.
        limit: ByteSize,
    },
    /// Local memory exceeds the guest's memory.
    #[error(
        "--local-memory {local} is more than --memory {memory}; lower the one or raise the other"
    )]
    LocalAboveMemory {
        /// Local memory.
        local: ByteSize,
        /// The guest's memory.
        memory: ByteSize,
    },
    /// Local memory exceeds the largest possible guest memory.
    #[error(
        "--local-memory {local} is more than --memory {memory} and --hotplug-memory {hotplug}, {limit} together; lower the one or raise one of the others"
    )]
    LocalAboveAllMemory {
        /// Local memory.
        local: ByteSize,
        /// The guest's memory at its start.
        memory: ByteSize,
        /// The limit of added memory.
        hotplug: ByteSize,
        /// The sum.
        limit: ByteSize,
    },
    /// No page would be remote, so there is nothing to measure.
    #[error(
        "--local-memory {local} is not less than --memory {memory}, so no page would be remote; lower the one or raise the other"
    )]
    NothingRemote {
        /// Local memory.
        local: ByteSize,
        /// Memory that is accessed.
        memory: ByteSize,
    },
    /// A part of the memory has no home.
    #[error(
        "--local-memory {local} leaves {missing} of the guest's {memory} without a home; add --donor HOST:PORT, or raise --local-memory to {memory}"
    )]
    NoDonor {
        /// Local memory.
        local: ByteSize,
        /// The guest's memory.
        memory: ByteSize,
        /// Memory without a home.
        missing: ByteSize,
    },
    /// The division of the memory is not specified.
    #[error(
        "with --donor it must be said how much of the guest's {memory} stays here; add --local-memory SIZE, or memory=SIZE to every donor"
    )]
    LocalMemoryNotGiven {
        /// The guest's memory.
        memory: ByteSize,
    },
    /// Local memory and the requested loans are less than the guest's memory.
    #[error(
        "the guest's {memory} is more than --local-memory {local} and the {lent} asked of donors; raise one of these or lower --memory"
    )]
    DonorsTooSmall {
        /// The guest's memory.
        memory: ByteSize,
        /// Local memory.
        local: ByteSize,
        /// Sum of the requested loans.
        lent: ByteSize,
    },
    /// Memory on donors cannot have that redundancy.
    #[error(transparent)]
    Redundancy(#[from] RedundancyError),
    /// A flag has no meaning with `--on-lost-memory poison`, or is not supported with it.
    #[error(
        "--on-lost-memory poison is for memory with one copy and vCPUs on one host; remove {0}, or use --on-lost-memory end"
    )]
    NotWithPoison(&'static str),
    /// `--drain-failing on` where no donor can be drained: what to do about it.
    #[error("--drain-failing on needs donors that can be drained; {0}, or remove that")]
    DrainFailing(&'static str),
    /// `--placement heat` where memory does not move by its heat: what to do about it.
    #[error(
        "--placement heat is for memory with one copy, on donors that the guest does not see; {0}, or use --placement static"
    )]
    PlacementHeat(&'static str),
    /// Sealed pages do not shrink.
    #[error(
        "--compression on has no effect on sealed pages, which do not shrink, and pages for donors on other hosts are sealed; remove it, or add --seal off"
    )]
    SealedWithCompression,
    /// Two donors have the same address.
    #[error("donor {second} is the same as {first}, at {address}; name each donor once")]
    DuplicateDonor {
        /// The first of them.
        first: HostPort,
        /// The second.
        second: HostPort,
        /// The address of both.
        address: SocketAddr,
    },
    /// More donors than are allowed.
    #[error(
        "too many donors: {count} given, {DONORS_MAX} is the limit; ask fewer for more memory each"
    )]
    TooManyDonors {
        /// Number of donors.
        count: usize,
    },
    /// More virtio devices than the machine supports.
    #[error(
        "too many virtio devices: {disks} disk(s), {nets} network card(s) and {others} other(s) given, {limit} in all is the limit; give fewer --disk or --net, or leave away others with --balloon off or --rng off"
    )]
    TooManyDevices {
        /// Number of disks.
        disks: usize,
        /// Number of network cards.
        nets: usize,
        /// Number of other devices.
        others: usize,
        /// The limit.
        limit: usize,
    },
    /// Donors were named for a transport without donors.
    #[error(
        "--transport loopback has its donor inside this process and takes no --donor; remove one of the two"
    )]
    LoopbackWithDonor,
    /// Rules for members, of a node that knows none.
    #[error(
        "--allow names members by their certificates, which this node does not ask for; add --credentials DIR, or remove --allow"
    )]
    AllowWithoutCredentials,
    /// Rules for members that cannot be used.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A node cannot register as configured.
    #[error(transparent)]
    Membership(#[from] MembershipError),
    /// A donor or node without the name that its certificate is compared with.
    #[error(
        "{what} {address} has no name to compare with its certificate; add name=NAME, where its certificate is of node/NAME"
    )]
    Unnamed {
        /// What the address is for.
        what: &'static str,
        /// The address.
        address: HostPort,
    },
    /// A name that nothing is compared with.
    #[error(
        "{what} {address} is given with name={name}, which only --credentials compares; add --credentials DIR, or remove name="
    )]
    NameWithoutCredentials {
        /// What the address is for.
        what: &'static str,
        /// The address.
        address: HostPort,
        /// The name.
        name: Name,
    },
    /// A fingerprint beside a name.
    #[error(
        "donor {address} is given with a fingerprint, and with --credentials its name= says who it is; remove fingerprint="
    )]
    FingerprintWithCredentials {
        /// The donor.
        address: HostPort,
    },
    /// TLS without TCP.
    #[error("--tls is for TCP; remove it, or use --transport tcp")]
    BenchTls,
    /// Sealing without a donor.
    #[error(
        "--seal seals pages for donors, and --transport loopback has none; remove it, or use --transport tcp"
    )]
    BenchSeal,
    /// Sealing beside compression.
    #[error(
        "--seal compares with pages that are not sealed, which compression would make smaller; add --compression off"
    )]
    BenchSealCompressed,
    /// Something else is compared, or there is no donor.
    #[error(
        "{what} is measured on donors over TCP or UDP, beside one copy of each page and without protection; remove {flag}"
    )]
    BenchRedundancy {
        /// The copies or stripes.
        what: String,
        /// What was given beside them.
        flag: &'static str,
    },
    /// A fingerprint for a transport that does not check it.
    #[error(
        "donor {address} is given with a fingerprint, which only --transport udp compares; add that, or remove fingerprint="
    )]
    FingerprintWithoutUdp {
        /// The donor.
        address: HostPort,
    },
    /// Two mechanisms to protect pages.
    #[error(
        "--checksum is for pages that travel by TCP or UDP; those that are read by RDMA have the CRC-32 of the adapters; remove --checksum, or use --transport tcp"
    )]
    RdmaWithChecksum,
    /// Settings of connections that are not made.
    #[error("--rdma has no effect with --transport {0}; remove one of them")]
    RdmaUnused(&'static str),
    /// Two devices.
    #[error(
        "--rdma-device {0} and --rdma device={1} both select the RDMA device; remove one of them"
    )]
    RdmaDeviceTwice(String, String),
    /// A command that would run repeatedly.
    #[error(
        "--exec runs its command once, and --on-reboot restart would boot its guest again; remove one of them"
    )]
    ExecWithRestart,
    /// The donors of a benchmark are not on a network.
    #[error(
        "--transport {0} needs a second host, and donors of this benchmark are in its process; use --transport tcp, udp or loopback, or `ssi-hv bench transport --donor HOST:PORT` with a node of another host"
    )]
    BenchByRdma(&'static str),
    /// Processes of this machine share no memory that way.
    #[error("--transport {0} carries no memory between compute nodes; use --transport tcp or rdma")]
    NotBetweenNodes(&'static str),
    /// Two transports are to be measured.
    #[error("--tls compares TCP with TLS; remove it, or --transport rdma")]
    RdmaWithTls,
    /// A port that cannot be used.
    #[error("donor {address} has port 0; give the port that the donor printed when it started")]
    PortZero {
        /// The address.
        address: HostPort,
    },
    /// A host name that has no address.
    #[error("cannot resolve {what} {address}; give an address, or a name that this host knows")]
    Unresolvable {
        /// What the address is for.
        what: &'static str,
        /// The address.
        address: HostPort,
        /// Its error.
        source: io::Error,
    },
    /// An address beyond this host without permission.
    #[error(
        "{what} {address} is not a loopback address, and pages travel without authentication or encryption: any host on that network can read and change the guest's memory; give --credentials DIR, or add --insecure to accept that"
    )]
    NotLoopback {
        /// What the address is for.
        what: &'static str,
        /// The address.
        address: HostPort,
    },
}
