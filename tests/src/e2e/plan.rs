//! Which scenarios run, and in which order.

use super::{
    Scenario, bed, boot, cli, compression, control, cpus, disks, distro, drain, exec, fault_kinds,
    faults, free_pages, hotplug, huge_shmem, hundred, irqchip, irqchip_compared, native_demo,
    network, nodes, nodes_lost, numa, placement, poison, rdma, rdma_faults, rdma_many,
    rdma_removed, rdma_sealed, rdma_settings, reads, ssi, stall, status, three_hosts, tour,
    transports, udp, up, vsock, working_set,
};

/// Scenarios that every run must have time for: each way a guest starts and ends, and each subsystem
/// once. A run with a time limit fails when it does not reach all of them.
const ESSENTIAL: &[&str] = &[
    "two_donor_hosts",
    "nodes_two_hosts",
    "boot_remote_1cpu",
    "boot_remote_2cpu",
    "boot_full_kernel",
    "donor_dies",
    "donor_returns",
    "control",
    "hotplug",
    "disks",
    "network",
    "exec",
    "hybrid",
    "udp_loss",
    "status_while_running",
    "irqchip_user_x2apic",
    "ctrl_c",
    "reboot_exit_code",
    "panic_exit_code",
    "doctor",
    "bad_input",
    "report_on_full_disk",
];

/// Scenarios to run: the groups in this order, and those of a group in its order.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Scenarios of the testbed itself: nothing runs in parallel with them.
    pub bed: Vec<Scenario>,
    /// Scenarios that every run must have time for. They may run in parallel.
    pub essential: Vec<Scenario>,
    /// Scenarios that compare times: nothing runs in parallel with them.
    pub alone: Vec<Scenario>,
    /// The others, which may run in parallel.
    pub together: Vec<Scenario>,
    /// Scenarios that take so long that they run only by name.
    pub long: Vec<Scenario>,
}

impl Plan {
    /// Returns all scenarios.
    #[must_use]
    pub fn all() -> Self {
        // The long ones start early, so that no testbed waits for another at the end.
        let parallel = [
            compression::SCENARIOS,
            free_pages::SCENARIOS,
            faults::SCENARIOS,
            huge_shmem::SCENARIOS,
            reads::SCENARIOS,
            rdma::SCENARIOS,
            rdma_removed::SCENARIOS,
            rdma_faults::SCENARIOS,
            rdma_many::SCENARIOS,
            rdma_sealed::SCENARIOS,
            rdma_settings::SCENARIOS,
            udp::SCENARIOS,
            transports::SCENARIOS,
            status::SCENARIOS,
            three_hosts::SCENARIOS,
            nodes::SCENARIOS,
            nodes_lost::SCENARIOS,
            control::SCENARIOS,
            hotplug::SCENARIOS,
            drain::SCENARIOS,
            poison::SCENARIOS,
            tour::SCENARIOS,
            up::SCENARIOS,
            disks::SCENARIOS,
            native_demo::SCENARIOS,
            network::SCENARIOS,
            numa::SCENARIOS,
            vsock::SCENARIOS,
            exec::SCENARIOS,
            boot::SCENARIOS,
            cpus::SCENARIOS,
            irqchip::SCENARIOS,
            cli::SCENARIOS,
            stall::SCENARIOS,
            working_set::SCENARIOS,
        ];
        let alone = [
            boot::MEASURED,
            fault_kinds::MEASURED,
            rdma::MEASURED,
            transports::MEASURED,
        ];
        let is_essential = |scenario: &Scenario| ESSENTIAL.contains(&scenario.name);
        let (mut essential, together): (Vec<_>, Vec<_>) =
            parallel.concat().into_iter().partition(is_essential);
        essential.sort_by_key(|s| ESSENTIAL.iter().position(|name| *name == s.name));
        Self {
            bed: bed::SCENARIOS.to_vec(),
            essential,
            alone: alone.concat(),
            together,
            long: [
                distro::SCENARIOS,
                hundred::LONG,
                irqchip_compared::LONG,
                nodes::LONG,
                placement::LONG,
                rdma_many::LONG,
                ssi::SCENARIOS,
            ]
            .concat(),
        }
    }

    /// Starts the last group at another scenario every day, so that runs whose time is too short for
    /// all of them reach each on some day.
    #[must_use]
    pub fn rotated(mut self, day: u64) -> Self {
        let places = self.together.len().max(1) as u64;
        // Below the length, which is a usize.
        let first = usize::try_from(day % places).unwrap_or(0);
        self.together.rotate_left(first);
        self
    }

    /// Returns whether any scenario boots a whole distribution.
    #[must_use]
    pub fn needs_distro(&self) -> bool {
        let boots_it = |s: &Scenario| distro::SCENARIOS.iter().any(|other| other.name == s.name);
        self.alone.iter().any(boots_it)
    }

    /// Keeps the scenarios whose names contain one of `parts`, including the long ones.
    #[must_use]
    pub fn named(mut self, parts: &[String]) -> Self {
        self.alone.append(&mut self.long);
        for group in [
            &mut self.bed,
            &mut self.essential,
            &mut self.alone,
            &mut self.together,
        ] {
            group.retain(|s| parts.iter().any(|part| s.name.contains(part.as_str())));
        }
        self
    }

    /// Iterates over all scenarios.
    pub fn scenarios(&self) -> impl Iterator<Item = &Scenario> {
        let groups = [
            &self.bed,
            &self.essential,
            &self.alone,
            &self.together,
            &self.long,
        ];
        groups.into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let plan = Plan::all();
        let mut names: Vec<_> = plan.scenarios().map(|s| s.name).collect();
        assert!(names.iter().all(|n| {
            n.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        }));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn every_essential_scenario_exists_and_runs_in_its_place() {
        let plan = Plan::all();
        let names: Vec<_> = plan.essential.iter().map(|s| s.name).collect();
        assert_eq!(names, ESSENTIAL);
    }

    #[test]
    fn a_rotation_only_changes_where_the_last_group_starts() {
        let names = |plan: &Plan| plan.scenarios().map(|s| s.name).collect::<Vec<_>>();
        let plan = Plan::all();
        let count = plan.together.len() as u64;
        let first = |day| Plan::all().rotated(day).together[0].name;
        assert_eq!(first(1), plan.together[1].name);
        assert_eq!(names(&Plan::all().rotated(count)), names(&plan));
        let mut firsts: Vec<_> = (0..count).map(first).collect();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len() as u64, count);
    }

    #[test]
    fn a_long_scenario_runs_by_its_name_only() {
        let plan = Plan::all();
        let is_long = |s: &Scenario| s.name == "distro_work_tcp";
        assert!(plan.long.iter().any(is_long) && !plan.alone.iter().any(is_long));
        assert!(!plan.needs_distro());
        for name in ["replicas_hundred", "replicas_rdma", "placement_heat"] {
            assert!(plan.long.iter().any(|s| s.name == name), "{name}");
        }
        let named = plan.named(&["distro_work_tcp".into()]);
        assert!(named.long.is_empty() && named.alone.iter().any(is_long));
        assert!(named.needs_distro());
    }

    #[test]
    fn scenarios_are_chosen_by_parts_of_their_names() {
        let plan = Plan::all().named(&["rdma_p".into(), "vsock".into()]);
        let names: Vec<_> = plan.scenarios().map(|s| s.name).collect();
        assert_eq!(names, ["rdma_probe", "vsock"]);
    }
}
